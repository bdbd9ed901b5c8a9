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
# This file alone may hold what it looks for.
MACHINE = re.compile(r"(?<![\w.}])/(?:work|root)/|(?<![\w.$}])/tmp/[a-z]+_|\bPIP_INDEX_URL\b")
REGISTRY = re.compile(r"(?:extra-)?index-url|trusted-host|artifactory|\bnexus\.")
CREDENTIAL = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|BEGIN [A-Z ]*PRIVATE KEY-----$"
)
# Talk about how the code came about, which is nobody's business who uses it.
BACKSTAGE = re.compile(r"\b(?:integrator|colleague|BRIEF\.md|DESIGN §)")
EXAMPLE_KEYS = ("AKIAIOSFODNN7EXAMPLE",)  # from the cloud's own documentation


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
        if name != relative(Path(__file__))
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_one_machine_is_tracked() -> None:
    assert matches(MACHINE) == []


def test_no_registry_host_is_tracked() -> None:
    assert matches(REGISTRY) == []


def test_no_credential_is_tracked() -> None:
    assert not [line for line in matches(CREDENTIAL) if not any(key in line for key in EXAMPLE_KEYS)]


def test_the_repository_speaks_of_the_product_alone() -> None:
    assert matches(BACKSTAGE) == []


def test_no_large_file_is_tracked() -> None:
    large = [name for name in tracked_text() if (ROOT / name).stat().st_size > 2_000_000]
    assert not large


def test_the_patterns_bite() -> None:
    assert MACHINE.search("see /" + "work/main")
    assert not MACHINE.search("/some/root/key, {tmp}/" + "work/x, ~/" + "work")
    assert REGISTRY.search("--index-url=x")
    assert CREDENTIAL.search("AKIA" + "A" * 16)
    assert CREDENTIAL.search("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert BACKSTAGE.search("the integrator writes")
    assert {"eval", "torch.load"} <= UNSAFE_CALLS
