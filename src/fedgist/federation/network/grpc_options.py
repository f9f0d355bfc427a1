"""The names and settings of gRPC that server and sites share."""

from __future__ import annotations

from fedgist.federation.network.frames import LARGEST_FRAME

SERVICE = "fedgist.Federation"
PROTOCOL = "1"  # a server and its sites must have the same
STREAM, COMMANDS = "Site", ("Status", "Stop")
LOOKAHEAD_BYTES = 4 << 20  # that may be on their way: 40 MB/s where an answer takes 0.1 s
KEEPALIVE_MS, ANSWER_MS, HANDSHAKE_MS = 10_000, 10_000, 10_000

OPTIONS = [
    ("grpc.max_receive_message_length", LARGEST_FRAME),
    ("grpc.max_send_message_length", LARGEST_FRAME),
    # gRPC's own window grows with the network's speed to 16 MB and more for each site
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    # a connection that was cut without a word is noticed
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", ANSWER_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    # two servers on one port would share the sites among them
    ("grpc.so_reuseport", 0),
    # a silent connection does not stay
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
]


def method_name(name: str) -> str:
    """Return the full name of a method of the service."""
    return f"/{SERVICE}/{name}"
