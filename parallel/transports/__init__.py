"""Transports of blocks between the processes of a mesh.

One interface, :class:`.group.Transport`, with one primitive: an *exchange*, in which a process sends batches of arrays
to others and fills sinks with theirs. Imports arrays, base and collectives (for the chunks of arrays, in ``pieces``).
From below:

* ``frames``: the head of a message, which says epoch, group, sequence and op;
* ``streams``, ``comms``, ``unix_socket``: byte streams, over sockets, TLS, or Dask's own connections;
* ``listener``, ``rendezvous``: the connections between processes, and their authentication;
* ``links``, ``shared_memory_link``, ``memory``: the connection to one other process; large messages may go through
  memory that both see;
* ``spin_poller``: waits until one of them is ready, awake for a moment and then asleep;
* ``group``: the links of a process, driven by one loop without threads. Begin here;
* ``staged``, ``nccl``: the same interface for blocks on GPUs.
"""
