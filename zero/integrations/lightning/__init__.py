"""Lightning's Trainer and Fabric, at any stage. Importing this registers `zero_stage_1` to `zero_stage_3`, as in
lightning.Trainer(strategy="zero_stage_2", devices=8) and lightning.Fabric(strategy="zero_stage_3", devices=8)."""

# ruff: noqa: E402 (the imports below are what fails with an older version)
from zero.integrations.oldest import refuse_older

refuse_older("lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zero.integrations.lightning.fabric import ZeroFabricStrategy
from zero.integrations.lightning.trainer import ZeroStrategy

for _stage in (1, 2, 3):
    _title = f"ZeRO stage {_stage}"
    StrategyRegistry.register(f"zero_stage_{_stage}", ZeroStrategy, _title, override=True, stage=_stage)
    STRATEGY_REGISTRY.register(f"zero_stage_{_stage}", ZeroFabricStrategy, _title, override=True, stage=_stage)

__all__ = ["ZeroFabricStrategy", "ZeroStrategy"]
