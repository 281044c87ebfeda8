"""The settings file of a command: YAML whose keys are the command's flags.

A flag of the command line goes before the environment, the environment before the file, the file
before the default. Every flag of the command can be set; a key that is no flag is refused. Touch
this when a file may say something else.
"""

from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import SlipstreamError, did_you_mean

ONLY_TYPED = frozenset({"settings", "check", "help"})  # of no use in a file


def use_settings_file(context: Any, path: Path | None) -> Path | None:
    """Take the values of a file as the defaults of a command's flags; for an eager option."""
    if path is None or context.resilient_parsing:
        return path
    known = {each.name: each for each in context.command.params if each.name not in ONLY_TYPED}
    values = {}
    for key, value in read_settings_file(path).items():
        name = key.replace("-", "_")
        if name not in known:
            flags = [flag.replace("_", "-") for flag in known]
            raise SlipstreamError(
                f"unknown key '{key}' in {path}{did_you_mean(key.replace('_', '-'), flags)}"
            )
        if value is not None:
            values[name] = _checked(context, known[name], key, value, path)
    context.default_map = {**(context.default_map or {}), **values}
    return path


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read a file of settings: one mapping, its keys text."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SlipstreamError(f"the settings {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        where = " ".join(str(error).split())
        raise SlipstreamError(f"the settings {path} are not YAML: {where}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SlipstreamError(f"the settings {path} are not lines of `flag: value`")
    return content


def _checked(context: Any, parameter: Any, key: str, value: object, path: Path) -> object:
    """Return a value as its flag takes it; a flag of several values takes a list."""
    scalar = isinstance(value, str | int | float | bool)
    listed = isinstance(value, list) and (parameter.multiple or parameter.nargs != 1)
    if not scalar and not listed:
        raise SlipstreamError(f"'{key}' in {path} is not one value; write it as for --{key}")
    text = value if isinstance(value, bool | list) else str(value)
    try:
        parameter.process_value(context, text)
    except Exception as error:
        message = getattr(error, "message", None)  # of the library that reads the arguments
        if message is None:
            raise
        raise SlipstreamError(f"'{key}' in {path}: {message}") from error
    return text
