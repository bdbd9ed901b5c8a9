"""Layers, the `sky/` folder, the map in the README."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from style.repo import PRODUCT, ROOT, modules, relative, tree

# What core may not touch: the world, the clock, chance.
IMPURE = {
    "asyncio", "glob", "http", "io", "multiprocessing", "os", "pathlib", "random", "requests",
    "secrets", "shutil", "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time",
    "urllib", "uuid",
}  # fmt: skip
# Which part alone may import which third party; a name ends in / for a package.
HOMES = {
    "torch": ("spotlight/rl/", "spotlight/parallel/", "spotlight/store/", "spotlight/runtime/"),
    "ray": ("spotlight/runtime/",),
    "sky": ("spotlight/provision/skypilot.py",),
    "boto3": ("spotlight/provision/aws.py",),
    "botocore": ("spotlight/provision/aws.py",),
    "google": ("spotlight/provision/gcp.py",),
    "typer": ("cli/spotlight_cli/",),
    "rich": ("cli/spotlight_cli/render.py", "cli/spotlight_cli/live.py"),
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def test_imports_go_down_only() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("package", sorted(HOMES))
def test_third_parties_have_one_home(package: str) -> None:
    strangers = [
        relative(path)
        for path in modules(*PRODUCT)
        if any(name == package or name.startswith(f"{package}.") for name in imported(path))
        and not any(
            relative(path).startswith(place) if place.endswith("/") else relative(path) == place
            for place in HOMES[package]
        )
    ]
    assert not strangers


def test_core_is_pure() -> None:
    dirty = {
        relative(path): sorted(bad)
        for path in modules("spotlight/core")
        if (bad := {name.partition(".")[0] for name in imported(path)} & IMPURE)
    }
    assert not dirty
    calls = {
        f"{relative(path)}:{node.lineno}"
        for path in modules("spotlight/core")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id in ("open", "print", "input"))
            or re.fullmatch(
                r"(np|numpy)\.random\.(?!default_rng|Generator|SeedSequence)\w+", ast.unparse(node.func)
            )
            or (ast.unparse(node.func).endswith("random.default_rng") and not node.args)
            or re.search(r"\b(datetime|date)\.(now|utcnow|today)$", ast.unparse(node.func))
        )
    }
    assert not calls


def test_sky_is_not_a_python_package() -> None:
    assert not [relative(path) for path in (ROOT / "sky").rglob("*.py")]


def test_sky_is_skypilot_with_the_checkout_first_on_the_path() -> None:
    probe = "import importlib.util; print(importlib.util.find_spec('sky').origin)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    origin = Path(done.stdout.strip())
    assert origin.name == "__init__.py"
    assert ROOT / "sky" not in origin.parents
    spec = importlib.util.find_spec("sky")
    assert spec is not None
    assert spec.origin == str(origin)


def readme_tree(text: str | None = None) -> set[str]:
    """The paths in the README's tree: indentation gives the folder, several names may share a line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8") if text is None else text
    block = max(
        (b for b in re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL) if "spotlight/" in b),
        key=len,
        default="",
    )
    paths: set[str] = set()
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        bare = re.sub(r"[│├└─]", " ", line)
        indent = len(bare) - len(bare.lstrip())
        while folders and folders[-1][0] >= indent:
            folders.pop()
        prefix = folders[-1][1] if folders else ""
        for word in bare.split():
            name = word.strip(",;()")
            if re.fullmatch(r"[\w./-]+/", name) and prefix + name not in paths:
                if not folders or folders[-1][0] < indent:
                    folders.append((indent, prefix + name))
                    prefix += name
                paths.add(prefix)
            elif re.fullmatch(r"[\w-]+\.\w+", name):
                paths.add(prefix + name)
            else:
                break
    return paths


def test_a_tree_is_read_by_its_indentation() -> None:
    drawn = """Text.
```
spotlight/          the library, no typer
├── errors.py       the tree; see core/types.py
├── core/           pure
│   ├── select.py   subsets
│   └── types.py    events.py are nouns
└── rl/
    └── models/
        └── tiny.py
cli/spotlight_cli/  parse, call, render
  main.py
```
"""
    assert readme_tree(drawn) == {
        "spotlight/", "spotlight/errors.py", "spotlight/core/", "spotlight/core/select.py",
        "spotlight/core/types.py", "spotlight/core/events.py", "spotlight/rl/", "spotlight/rl/models/",
        "spotlight/rl/models/tiny.py", "cli/spotlight_cli/", "cli/spotlight_cli/main.py",
    }  # fmt: skip


def test_the_readme_tree_lists_every_module() -> None:
    listed = readme_tree()
    missing = [
        relative(path)
        for path in modules(*PRODUCT)
        if path.name != "__init__.py" and relative(path) not in listed
    ]
    assert not missing, "\n".join(["add to the tree in README.md, one line each:", *missing])


def test_the_readme_tree_lists_nothing_that_is_not_there() -> None:
    gone = [path for path in readme_tree() if path.endswith(".py") and not (ROOT / path).is_file()]
    assert not gone
