"""What a run is made of: data, partition, clients, models, peers, privacy."""
