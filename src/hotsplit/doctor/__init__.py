"""`hotsplit doctor`: finds what works on this machine, what does not, and what to do about it.

Whatever may be broken (torch, Triton, a kernel, a driver) is tried in a child process with a time
limit, so that a crash becomes a line of the report."""
