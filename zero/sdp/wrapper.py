"""What ShardedDDP and FSDP have in common: to tools they look like the module that they wrap, under its own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Wrapper(nn.Module):
    """Around one module, `module`. Names of parameters and buffers are the module's, as in its state_dict()."""

    module: nn.Module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, under its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The module's own, under its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint.state_dict: the child `module` is not part of any name."""
        return {"": "module"}

    # Of a module that is a container, such as nn.Sequential; of others these raise as they do.

    def __len__(self) -> int:
        return len(self._contained)

    def __bool__(self) -> bool:
        return True  # as of any module, also where it has no length

    def __getitem__(self, key: Any) -> Any:
        return self._contained[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._contained)

    @property
    def _contained(self) -> Any:
        return self.module

    # The module's state_dict() is this one's, so hooks on it belong to the module.

    def register_state_dict_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_state_dict_pre_hook(hook))

    def register_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_state_dict_post_hook(hook))

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_load_state_dict_pre_hook(hook))

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_load_state_dict_post_hook(hook))
