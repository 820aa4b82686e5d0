"""HandoffCore: prefill-to-decode transfer under leases (owner, epoch, deadline)."""
