"""headrace serves large language models at the highest goodput their hardware can give."""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import of typing

if TYPE_CHECKING:
    from headrace.llm import LLM as LLM

__all__ = ["LLM", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`LLM` is imported when it is first asked for, so that `import headrace` costs nothing."""
    if name == "LLM":
        from headrace.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
