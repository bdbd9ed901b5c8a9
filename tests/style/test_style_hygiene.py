"""What must not be in the repository: unsafe calls, secrets, traces of one machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from style.repo import PRODUCT, ROOT, modules, relative, tracked_text, tree

UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "unittest.mock",
    "imp",
}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "os.system", "os.popen", "torch.load", "torch.save", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "pickle.loads", "pickle.load", "numpy.load",
    "np.load", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "tempfile.mktemp",
}  # fmt: skip
# Put together from pieces, so that this file does not hold what it looks for.
MACHINE = re.compile(
    "|".join(
        (
            r"(?<![\w.])/wo" r"rk/",
            r"/ro" r"ot/(?!\.)",
            r"(?<![\w.$}])/tm" r"p/[a-z]+_",
            r"\bPIP_INDEX" r"_URL\b",
        )
    )
)
REGISTRY = re.compile(
    "|".join((r"(?:extra-)?index-" r"url", r"trusted-" r"host", "artifactory", r"\bnexus" r"\."))
)
CREDENTIAL = re.compile(
    "|".join(
        (
            r"\b(?:AK" r"IA|AS" r"IA)[0-9A-Z]{16}\b",
            r"\bh" r"f_[A-Za-z0-9]{30,}",
            r"\bgh[pousr]" r"_[A-Za-z0-9]{30,}",
            r"BEGIN [A-Z ]*PRIVATE" r" KEY-----\n[A-Za-z0-9+/]{40}",
        )
    )
)
# Talk about how the code came about, which is nobody's business who uses it.
BACKSTAGE = re.compile(
    r"\b(?:" + "|".join(("integrator", "colleague", "BRI" r"EF\.md", "DES" r"IGN §")) + r")\b"
)
EXAMPLE_KEYS = ("AKIA" + "IOSFODNN7EXAMPLE",)


def calls(path: Path) -> list[tuple[ast.Call, str]]:
    return [(node, ast.unparse(node.func)) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


def test_no_unsafe_module_is_imported() -> None:
    found = [
        f"{relative(path)}:{node.lineno} {name}"
        for path in modules(*PRODUCT, "tests", "benchmarks")
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name in UNSAFE_MODULES or name.partition(".")[0] in UNSAFE_MODULES
    ]
    assert not found


def test_no_unsafe_call_is_made() -> None:
    found = [
        f"{relative(path)}:{call.lineno} {name}"
        for path in modules(*PRODUCT, "benchmarks")
        for call, name in calls(path)
        if name in UNSAFE_CALLS and not is_safe_load(path, call, name)
    ]
    assert not found


def is_safe_load(path: Path, call: ast.Call, name: str) -> bool:
    """`yaml.load` with a loader that this very module derives from SafeLoader, or numpy without pickles."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in ("np.load", "numpy.load"):
        return keywords.get("allow_pickle") == "False"
    bases = {
        node.name: [ast.unparse(base) for base in node.bases]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    }
    return name == "yaml.load" and bases.get(keywords.get("Loader", "")) == ["yaml.SafeLoader"]


def test_no_shell_is_given_a_string() -> None:
    found = [
        f"{relative(path)}:{call.lineno}"
        for path in modules(*PRODUCT, "benchmarks", "tests")
        for call, _ in calls(path)
        for keyword in call.keywords
        if keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
    ]
    assert not found


def test_no_remote_code_is_trusted() -> None:
    found = [
        f"{relative(path)}:{call.lineno}"
        for path in modules(*PRODUCT)
        for call, _ in calls(path)
        for keyword in call.keywords
        if keyword.arg in ("trust_remote_code", "allow_pickle") and ast.unparse(keyword.value) != "False"
    ]
    assert not found


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in tracked_text().items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_one_machine_is_tracked() -> None:
    assert not matches(MACHINE)


def test_no_registry_host_is_tracked() -> None:
    assert not matches(REGISTRY)


def test_no_credential_is_tracked() -> None:
    assert not [line for line in matches(CREDENTIAL) if not any(key in line for key in EXAMPLE_KEYS)]


def test_the_repository_speaks_of_the_product_alone() -> None:
    assert not matches(BACKSTAGE)


def test_no_large_file_is_tracked() -> None:
    large = [name for name in tracked_text() if (ROOT / name).stat().st_size > 2_000_000]
    assert not large


def test_the_patterns_bite() -> None:
    assert MACHINE.search("see /wo" + "rk/main")
    assert REGISTRY.search("--index-" + "url=x")
    assert CREDENTIAL.search("AK" + "IA" + "A" * 16)
    assert BACKSTAGE.search("the integ" + "rator writes")
    assert {"eval", "torch.load"} <= UNSAFE_CALLS
