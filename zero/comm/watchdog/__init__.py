"""The watchdog of a process group: a thread that ends the waiting of all ranks when one of them is missing.

Over Gloo and NCCL the host, or the device, of a rank may wait in vain: for a rank that has ended or was stopped, or
because ranks are out of step and wait in different operations. NCCL then ends the process after the group's timeout.

Each process has a thread for each group. Every rank is connected with the first one, to which it says where it is: the
`Hub` there keeps the last state of every rank, knows when a process ends, as the system then closes its connection, and
comes to one verdict for all. Where a rank is missing, logs differ, or ranks can never meet, it tells all ranks. Their
`Watchdog` marks the log of the group as broken, which also aborts what runs on the device: a host that waits for the
device goes on, and the next call of zero raises what the hub has found.

A settled step pays nothing: the thread looks five times a second where the log is.
"""
