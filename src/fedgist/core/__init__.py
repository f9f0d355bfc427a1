"""The vocabulary and the arithmetic: pure functions of values, on torch and safetensors.

Authors of methods import from these modules, whose names are kept; everything else in ``core`` may
change with any version.

===================  =============================================================================
module               what an author of a method takes from it
===================  =============================================================================
``method``           ``Method``, its functions, and every type that they are given or return
``message``          ``message``, ``Nothing``: what crosses between server and clients
``tree``             ``tree``: states of more than one tensor; ``named``, ``map_leaves``
``random``           keyed draws: ``uniform``, ``normal``, ``integers``, ``permutation``, ``choice``
``wire_form``        forms in which a field of a message travels: ``FLAGS``, ``NONZERO``, ``SIGNS``
``counts``           fields of a message that count rows: ``COUNTS``, ``COUNTS_FIRST``
``bounds``           types of hyper-parameters with bounds: ``Positive``, ``Share``, ``PositiveInt``
``losses``           means over the rows that are present: ``masked_mean``
``linear_head``      ``class_sums``, ``class_means``, ``LinearHead``
``averaging``        ``Averaging``, ``Weights``: weighted averages of weights
``newest``           ``Newest``: each client's newest message, for servers that relay
``sampling``         ``drawn_clients``: which clients take part in a round
``server_training``  steps of an optimizer at the server, cut into stages that can be resumed
===================  =============================================================================
"""
