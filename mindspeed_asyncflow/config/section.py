"""What every section of the settings has in common."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Crosses between processes as JSON text: their environments may have different releases of pydantic."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def __reduce__(self) -> tuple[Callable[[type[Section], str], Section], tuple[type[Section], str]]:
        return _read, (type(self), self.model_dump_json())


def _read(kind: type[Section], text: str) -> Section:
    return kind.model_validate_json(text)
