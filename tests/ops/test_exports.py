"""The public names of ops and models load, and type checkers see the same ones."""

import ast
import inspect

import pytest

from slipstream import models, ops


@pytest.mark.parametrize("room", [ops, models])
def test_every_public_name_loads_and_is_known_to_type_checkers(room):
    assert dir(room) == sorted(room.__all__)
    imports = [n for n in ast.walk(ast.parse(inspect.getsource(room))) if isinstance(n, ast.If)]
    typed = {name.name for block in imports for node in block.body for name in node.names}
    assert typed == set(room.__all__)
    for name in room.__all__:
        assert getattr(room, name).__module__.startswith(room.__name__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'hstu'"):
        _ = ops.hstu
