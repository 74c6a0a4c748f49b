"""The watchdog of a process group: a thread that ends the waiting of all ranks when one of them is missing.

Over Gloo and NCCL the host, or the device, of a rank may wait in vain: for a rank that has ended or was stopped, or
because ranks are out of step and wait in different operations. NCCL then ends the process after the group's timeout.

One thread in each process (`loop`) holds connections for all groups. In each group every rank has one to the first
rank, whose `Hub` knows when another process ends, as the system then closes its connection, and reads the log of every
rank whose log has not moved lately. Where it finds a rank missing or logs that differ, it tells all ranks. Their
`Watchdog` marks the log of the group as broken, which also aborts what runs on the device: a host that waits for the
device goes on, and the next call of zero raises what the hub has found.

A settled step pays nothing: the thread looks five times a second where the log is.
"""
