"""The queue's door: files, batches and their lines, written down before anybody is told that they are accepted."""
