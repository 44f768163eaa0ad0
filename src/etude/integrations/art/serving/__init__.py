"""What ART's clients ask of a server: an extension of `etude serve`, for the releases 0.4 and 0.5."""

from etude.server.extensions import register_server_extension

register_server_extension("etude.integrations.art.serving.extension:ArtExtension")
