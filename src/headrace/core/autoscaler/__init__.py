"""AutoscalerCore: how many replicas of which role there are, and which of them leaves.

Decides from what pools did and what a replica can do; refuses to know what a replica is made of,
how it is started, and where."""
