"""headrace serves large language models at the highest goodput their hardware can give."""

__version__ = "0.1.0"
