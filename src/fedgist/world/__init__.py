"""The parts of a run: data, partition, clients, models, peers, privacy."""
