"""One frozen configuration schema, merged from named sources; unknown keys are errors."""
