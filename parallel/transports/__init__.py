"""Transports of blocks between the processes of a mesh.

One interface, :class:`.group.Transport`, with one primitive: an *exchange*, in which a process sends batches of arrays to others and
fills sinks from what they send. The parts, from below:

* ``frames``: the head of a message, which says epoch, group, sequence and op;
* ``pieces``: arrays in bounded chunks, and the sinks that take them or join them in a fixed order;
* ``streams``, ``comms``: byte streams, over sockets, TLS, or Dask's own connections;
* ``links``, ``slots``, ``memory``: the connection to one other process; large messages may go through memory that both see;
* ``waiting``: until one of them is ready, awake for a moment and then asleep;
* ``group``: the links of a process, driven by one loop without threads;
* ``nccl``: the same interface between GPUs.

Who connects to whom, and who is let in, is ``dataplane``'s business; which algorithm a collective uses, that of ``rounds``.
"""
