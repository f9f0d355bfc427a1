"""The interfaces and mathematics of methods: pure functions of values, on torch and safetensors.

Authors of methods import from these modules, and the names of these modules are stable. Everything
else in ``core`` and ``methods.common`` may change with any version.

===================================  =============================================================
module                               contents for an author of a method
===================================  =============================================================
``core.method``                      ``Method``, its functions, and every type of their arguments
``core.peer_method``                 ``PeerMethod``: its clients receive each other's messages
``core.message``                     ``message``, ``Nothing``: what clients and server exchange
``core.tree``                        ``tree``: a state of several tensors; ``named``, ``map_leaves``
``core.random``                      random numbers by key: ``uniform``, ``normal``, ``choice``
``core.wire_form``                   compact fields of a message: ``FLAGS``, ``NONZERO``
``core.counts``                      fields that count rows: ``COUNTS``, ``COUNTS_FIRST``
``core.bounds``                      hyper-parameters with bounds: ``Positive``, ``Share``
``core.losses``                      means over the rows of a batch: ``masked_mean``
``core.sampling``                    ``drawn_clients``: the clients of a round
``methods.common.linear_head``       ``class_sums``, ``class_means``, ``LinearHead``
``methods.common.averaging``         ``Averaging``, ``Weights``: weighted averages of weights
``methods.common.latest_messages``   ``LatestMessages``: each client's newest message, for a relay
``methods.common.server_training``   training steps at the server, in stages that can be resumed
===================================  =============================================================
"""
