"""Which processes exist: launch, supervise, discover, drain; the front end that runs FrontCore.

Decides when a process is started or given up; refuses to know what a request says."""
