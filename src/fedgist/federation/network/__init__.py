"""The network of a federation: gRPC, the frames on it, and the notes that open a connection."""
