"""The link: collectives between the ranks of one host through shared memory."""
