"""The server side of ART's protocols, of the releases 0.4 and 0.5: an extension of `etude serve`."""
