"""The oldest versions of other libraries that the integrations are tested with. setup.cfg asks for the same."""

from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion

OLDEST = {"accelerate": "1.15.0", "transformers": "5.23.0", "lightning": "2.6.0"}


def refuse_older(library: str) -> None:
    """Raises ImportError for a library that lacks what the integration calls, before only some ranks find out."""
    oldest = OLDEST[library]
    try:
        found = version(library)
    except PackageNotFoundError:
        found = None
    if found is None or TorchVersion(found) < oldest:
        raise ImportError(
            f"zero.integrations.{library} needs {library} {oldest} or newer, and {found or 'none'} is installed. Run: "
            f"pip install --upgrade '{library}>={oldest}'"
        )
