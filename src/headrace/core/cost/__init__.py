"""One cost model: step_ns and copy_ns, fitted from recorded steps or derived from a data sheet."""
