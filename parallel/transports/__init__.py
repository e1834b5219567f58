"""How blocks travel between the processes of a mesh: small parts behind one interface, :class:`~.group.Transport`."""
