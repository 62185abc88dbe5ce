"""What is measured in a checkout: speeds, comparisons with other software, the figures of the papers."""
