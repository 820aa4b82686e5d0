"""Load generation, SLO goodput reports and kernel benchmarks.

Decides how load is offered and how results are counted; refuses to know which server answers."""
