"""The reference: a page for each public module, made from its signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import re
import types
from collections.abc import Iterator
from typing import Any

from docs.markdown import escaped, from_docstring

PACKAGE = "fedjax_cluster"
PAGES = {  # page -> modules, in the order of a reader's questions
    "fc": ("",),
    "data": ("data", "data.cache"),
    "scenarios": ("data.scenarios",),
    "nn": ("nn",),
    "local": ("local",),
    "algorithms": ("algorithms", "algorithms.round"),
    "robustness": ("aggregation", "faults", "privacy"),
    "clustering": ("clustering", "clustering.scores"),
    "report": ("report", "report.methods"),
    "parallel": ("parallel",),
    "experiments": (
        *("experiments.config", "experiments.config_files", "experiments.comparison", "experiments.outcomes"),
        *("experiments.sweeps", "experiments.tuning", "experiments.runs"),
    ),
    "parts": ("types", "options", "optimizers", "lifting", "cohorts", "server", "inference", "simulation.loggers"),
}
LONGEST_SIGNATURE = 88


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public name: `fc.clustering.kmeans`."""

    name: str
    value: Any
    defined_in: types.ModuleType

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


def module_of(name: str) -> types.ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}".rstrip("."))


def entries(name: str) -> list[Entry]:
    """The public names of a module, without the modules among them."""
    module, prefix = module_of(name), f"fc.{name}".rstrip(".")
    found = [
        Entry(f"{prefix}.{each}", getattr(module, each), module)
        for each in public_names(module)
        if not inspect.ismodule(getattr(module, each))
    ]
    if name.startswith("report") and hasattr(module, "__path__"):
        for part in pkgutil.iter_modules(module.__path__):
            if not part.ispkg:
                found += entries(f"{name}.{part.name}")
    return found


def public_names(module: types.ModuleType) -> list[str]:
    """What a package's `__init__` or stub offers; of a module, the functions and classes that it defines."""
    if hasattr(module, "__path__"):
        stub = pathlib.Path(module.__path__[0], "__init__.pyi")
        text = stub.read_text(encoding="utf-8") if stub.exists() else inspect.getsource(module)
        imported = [alias for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) for alias in node.names]
        return [alias.asname or alias.name for alias in imported]
    own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [each for each in own if not each.startswith("_") and (callable(getattr(module, each)))]


def anchors() -> dict[str, str]:
    """Name -> page and anchor, for the links in the text."""
    return {each.name: f"reference/{page}.md#{each.name}" for page in PAGES for each in of_page(page)}


def of_page(page: str) -> list[Entry]:
    return [each for name in PAGES[page] for each in entries(name)]


def page_text(page: str) -> str:
    """The Markdown of a page."""
    first = PAGES[page][0]
    lines = [f"# `{f'fc.{first}'.rstrip('.')}`\n", from_docstring(module_of(first).__doc__ or "")]
    lines += [_modules()] if not first else []
    lines += [f"## `{each.name}` {{ #{each.name} }}\n\n{described(each)}" for each in of_page(page)]
    return "\n".join(lines) + "\n"


def _modules() -> str:
    """What is below `fc`, each with the first line of its documentation."""
    pages = {module: page for page, modules in reversed(PAGES.items()) for module in modules}
    root, lines = module_of(""), []
    for name in public_names(root):
        if inspect.ismodule(module := getattr(root, name)):
            page = pages.get(name) or next((of for module, of in pages.items() if module.startswith(name)), None)
            title = f"[`fc.{name}`]({page}.md)" if page else f"`fc.{name}`"
            lines.append(f"- {title}: {escaped((inspect.getdoc(module) or '').partition(chr(10))[0])}")
    return "\n".join(lines) + "\n"


def described(entry: Entry) -> str:
    """Signature and documentation of a name."""
    value = entry.value
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return _constant(entry)
    parts = [_fenced(signature(entry.short, value)), from_docstring(_docstring(value))]
    if inspect.isclass(value):
        parts += [_fields(value), *_methods(value)]
    return "\n".join(parts)


def signature(name: str, value: Any) -> str:
    """A call as one would write it, a line an argument where it is long."""
    if getattr(value, "_is_protocol", False):
        return f"class {name}(Protocol)"
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parts = list(_parameters(found))
    end = _hint(found.return_annotation)
    returned = "" if inspect.isclass(value) or not end else f" -> {end}"
    line = f"{name}({', '.join(parts)}){returned}"
    if len(line) <= LONGEST_SIGNATURE:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _parameters(found: inspect.Signature) -> Iterator[str]:
    starred = False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        hint = _hint(parameter.annotation)
        text = f"{stars}{parameter.name}{f': {hint}' if hint else ''}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        yield text


def _hint(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"""ForwardRef\((['"])(.*?)\1\)""", r"\2", text).replace(f"{PACKAGE}.", "")


def _default(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _docstring(value: Any) -> str:
    text = inspect.cleandoc(vars(value).get("__doc__") or "") if inspect.isclass(value) else inspect.getdoc(value) or ""
    # NamedTuples and dataclasses without a docstring get their signature for one.
    return "" if inspect.isclass(value) and text.startswith(f"{value.__name__}(") else text


def _fields(cls: type) -> str:
    """The fields of a NamedTuple or dataclass, with the comments beside them."""
    if not (hasattr(cls, "_fields") or dataclasses.is_dataclass(cls)) or "\nArgs:" in (inspect.getdoc(cls) or ""):
        return ""
    rows = re.findall(r"^    (\w+): ([^#=\n]+?)(?: = [^#\n]+?)?(?:  # (.*))?$", inspect.getsource(cls), re.MULTILINE)
    rows = [(name, hint, note) for name, hint, note in rows if not name.startswith("_")]
    return "\n".join(f"- `{name}: {hint}`{f' – {note}' if note else ''}" for name, hint, note in rows) + "\n"


def _methods(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        function = getattr(value, "fget", None) or getattr(value, "func", None) or value
        if (name.startswith("_") and name != "__call__") or not inspect.isfunction(function) or not function.__doc__:
            continue
        shown = f"{cls.__name__}.{name}" if function is not value else signature(f"{cls.__name__}.{name}", value)
        yield f"{_fenced(shown)}\n{from_docstring(inspect.getdoc(function) or '')}"


def _constant(entry: Entry) -> str:
    value = entry.value
    if isinstance(value, dict):
        return f"Names: {', '.join(f'`{key}`' for key in value)}.\n"
    documented = inspect.getdoc(type(value)) if type(value).__module__.startswith(PACKAGE) else None
    shown = str(value).replace(f"{PACKAGE}.", "")
    return f"`{shown}`\n\n{from_docstring(documented or '')}"


def _fenced(text: str) -> str:
    return f"```python {{.signature}}\n{text}\n```\n"
