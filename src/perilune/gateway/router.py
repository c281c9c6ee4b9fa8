"""Model ids to the ChatModels that serve them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perilune.core.protocols import ChatModel
from perilune.gateway.errors import UnknownModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A model on offer."""

    model: ChatModel
    max_context: int | None = None
    failure: Callable[[], str | None] = lambda: None
    """Why the model can serve nothing now; None while it can."""
    created: int = field(default_factory=lambda: int(time.time()))

    def card(self) -> Mapping[str, Any]:
        """The OpenAI model object, with the context length that other servers add to it."""
        card = {
            "id": self.model.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "perilune",
        }
        return card if self.max_context is None else card | {"max_model_len": self.max_context}


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = {route.model.model_id: route for route in routes}

    def resolve(self, model_id: str) -> Route:
        """Raises UnknownModelError, naming the models there are."""
        route = self._routes.get(model_id)
        if route is None:
            known = ", ".join(self._routes)
            raise UnknownModelError(
                f"the model {model_id[:100]!r} does not exist here; there is: {known}",
                param="model",
            )
        return route

    def failure(self) -> str | None:
        """The first failure among the models."""
        return next(filter(None, (route.failure() for route in self._routes.values())), None)

    def cards(self) -> list[Mapping[str, Any]]:
        return [route.card() for route in self._routes.values()]
