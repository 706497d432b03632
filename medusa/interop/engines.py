"""All formats that `medusa export` knows, by name."""

from __future__ import annotations

from .engine import Engine
from .hf_format import HfEngine
from .mlc_format import MlcEngine
from .original_format import MedusaV1Engine, MedusaV2Engine
from .tgi_format import TgiEngine
from .trtllm_format import TrtllmEngine
from .vllm_format import VllmEngine

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        VllmEngine(), TgiEngine(), TrtllmEngine(), MlcEngine(), MedusaV1Engine(), MedusaV2Engine(), HfEngine(),
    )
}  # fmt: skip
