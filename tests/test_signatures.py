"""What is public, and how it is called, changes on purpose alone: `python tests/test_signatures.py` writes it anew."""

import inspect
from collections.abc import Iterator
from pathlib import Path

PINNED = Path(__file__).with_name("public_signatures.txt")


def signatures() -> Iterator[str]:
    """A line for each public function, class and method of `fused_grpo` and `fused_grpo.trainer`."""
    import fused_grpo
    from fused_grpo import trainer

    for package in (fused_grpo, trainer):
        for name in sorted(package.__all__):
            item = getattr(package, name)
            if callable(item):
                yield line_of(f"{package.__name__}.{name}", item)
            for method in dir(item) if inspect.isclass(item) else ():
                function = inspect.getattr_static(item, method)
                ours = inspect.isfunction(function) and function.__module__.startswith("fused_grpo")
                if ours and not method.startswith("_"):
                    yield line_of(f"{package.__name__}.{name}.{method}", function)


def line_of(name: str, item: object) -> str:
    """Of a dataclass of options that is its fields and their defaults, too."""
    return f"{name}{inspect.signature(item)}"  # type: ignore[arg-type]


def test_public_signatures_are_as_pinned():
    assert "\n".join(signatures()) + "\n" == PINNED.read_text()


if __name__ == "__main__":
    PINNED.write_text("\n".join(signatures()) + "\n")
