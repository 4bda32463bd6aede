"""User code named in a config: `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_mlm.errors import UserError


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that `spec` names; UserError names the config key, and what the module has instead."""
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise UserError(f"{key}: {spec!r} is not of the form module:function or path/to/file.py:function")
    module = _load_module(module_name, f"{key}: {spec!r}")
    function = getattr(module, name, None)
    if not callable(function):
        own = sorted(
            n for n, v in vars(module).items()
            if inspect.isfunction(v) and v.__module__ == module.__name__ and not n.startswith("_")
        )  # fmt: skip
        raise UserError(f"{key}: {module_name} has no function {name!r}; it has {', '.join(own) or 'none'}")
    return function


def _load_module(name: str, where: str) -> ModuleType:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise UserError(
                    f"{where}: there is no module {error.name!r} on the import path; "
                    "for a file write path/to/file.py:function"
                ) from None
            raise UserError(f"{where}: importing {name} failed: {error}") from error
        except (Exception, SystemExit) as error:  # whatever the user's module does at import
            raise UserError(f"{where}: importing {name} failed: {type(error).__name__}: {error}") from error
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path.absolute()}")
    # A name that no import statement can mean; dataclasses look their module up by it.
    own_name = f"{path.absolute()}"
    spec = importlib.util.spec_from_file_location(own_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file does at import
        del sys.modules[own_name]
        raise UserError(f"{where}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module
