"""Ray: the actor that hosts a worker, the session, placement. Only these modules import Ray."""
