"""What Python declares of the compiled functions is what native/kernels.h declares."""

import re
from pathlib import Path

import pytest

from slipstream.ops import attention_native, layer_pass
from slipstream.ops.kernel_signatures import SIGNATURES, Signature, parse_declarations

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "native").exists(), reason="the sources of the kernels are not here"
)


def header_signatures(text: str) -> dict[str, Signature]:
    """The exported functions of native/kernels.h, in the words of kernel_signatures.py."""
    text = re.sub(r"//.*|^#.*|namespace[^}]*}", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b(SLIPSTREAM_API|const)\b|slipstream::", "", text)
    return parse_declarations(re.sub(r"\b(u?int\d+)_t\b", r"\1", text))


def differences(header: str) -> list[str]:
    """The functions that the header and Python do not declare alike."""
    found = header_signatures(header)
    return sorted(
        name for name in found.keys() | SIGNATURES.keys() if found.get(name) != SIGNATURES.get(name)
    )


def header() -> str:
    return (ROOT / "native" / "kernels.h").read_text()


def test_python_declares_every_function_as_the_header_does():
    assert len(SIGNATURES) > 25
    assert differences(header()) == []


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("int64_t width, float* masks, int threads);", "int64_t width, int threads);", 1),
        ("const float* z, const float* grad", "const float* z, const int64_t* grad", 1),
        ("double beta1, double beta2", "float beta1, float beta2", 1),
        ("int64_t seed, const int64_t* rows,", "int32_t seed, const int64_t* rows,", 2),
        ("void ss_hash_find(", "int64_t ss_hash_find(", 1),
        ("const float* x, const float* gate", "const float* gate, const float* x", 2),
        ("ss_keep_freed_memory", "ss_keep_memory", 2),
    ],
)
def test_a_changed_header_is_noticed(old, new, changed):
    assert old in header()
    assert len(differences(header().replace(old, new))) >= changed


def test_every_function_defined_is_declared_in_the_header_and_called_from_python():
    defined = {
        name
        for path in (ROOT / "native").glob("*.cpp")
        for name in re.findall(r"SLIPSTREAM_API \w+ (ss_\w+)\(", path.read_text())
    }
    called = {
        name
        for path in (ROOT / "src" / "slipstream").rglob("*.py")
        if path.name != "kernel_signatures.py"
        for name in re.findall(r"\"(ss_\w+)\"", path.read_text())
    }
    assert defined == called == set(SIGNATURES)


# The structures that kernels and Python share: header, C name, ctypes class.
STRUCTURES = [
    ("attention_plan.h", "AttentionCall", attention_native._Call),
    ("layer_pass.h", "LayerWeights", layer_pass._Layer),
    ("layer_pass.h", "LayerPass", layer_pass._Pass),
]
ENUMS = {"Stored", "LayerKind", "Activation"}  # of int32_t


@pytest.mark.parametrize(("header_name", "name", "ours"), STRUCTURES)
def test_a_structure_is_the_one_of_the_kernels(header_name, name, ours):
    text = (ROOT / "native" / header_name).read_text()
    body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)[1]
    fields = []
    for line in re.sub(r"//.*", "", body).replace("const ", "").split(";"):
        if words := re.findall(r"\w+|\*", line):
            kind = "int32_t" if words[0] in ENUMS else words[0]
            names = [word for word in words[1:] if word != "*"]
            fields += [(field, "pointer" if "*" in words else kind) for field in names]
    kinds = {"c_void_p": "pointer", "c_long": "int64_t", "c_float": "float", "c_int": "int32_t"}
    assert [(field, kinds[kind.__name__]) for field, kind in ours._fields_] == fields
