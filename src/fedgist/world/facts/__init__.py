"""What sites know together before training: counts, moments, histograms and categories as sums."""
