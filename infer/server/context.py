"""What the routes share: one per server, made by `app.create_app`'s caller."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from medusa.base_model import BaseModel

from ..service import EngineService
from .errors import ApiError
from .grammar import GrammarCompiler
from .limits import Limits
from .metrics import Metrics
from .text_codec import TextCodec
from .tools import ToolFormat


@dataclass
class ServerContext:
    """model_id: the name that clients use. is_draining: set once, when the server begins to stop."""

    service: EngineService
    base_model: BaseModel
    codec: TextCodec
    grammar: GrammarCompiler
    tool_format: ToolFormat
    limits: Limits
    metrics: Metrics
    model_id: str
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if name is not None and name != self.model_id:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")
