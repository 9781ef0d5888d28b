"""The schema of a configuration file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from kvhal.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Backends(_Section):
    """``[backends]``: which backends may serve; names are checked against the registry later."""

    preference: list[StrictStr] | None = None
    force: StrictStr | None = None
    ops: dict[StrictStr, StrictStr] = Field(default_factory=dict)


class Ascend(_Section):
    """``[ascend]``: the functional simulator."""

    simulate: StrictBool | None = None


class ConfigFile(_Section):
    """A whole file; every key is optional, an unknown one is an error."""

    strict: StrictBool | None = None
    backends: Backends = Field(default_factory=Backends)
    ascend: Ascend = Field(default_factory=Ascend)


def read(document: dict[str, Any], path: str) -> ConfigFile:
    """The checked file.

    Raises:
        ConfigError: names the file and, for each fault, the key, what is wrong and what the section knows.
    """
    try:
        return ConfigFile.model_validate(document)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {_say(fault)}" for fault in error.errors())
        raise ConfigError(f"{path}: {faults}") from error


def _say(fault: Any) -> str:
    if fault["type"] != "extra_forbidden":
        return f"has {fault['input']!r}, {fault['msg']}"
    sections: dict[str, type[BaseModel]] = {"backends": Backends, "ascend": Ascend}
    known = sections[str(fault["loc"][0])] if len(fault["loc"]) > 1 else ConfigFile
    return f"unknown key; known here: {', '.join(known.model_fields)}"
