"""The fields of customers' tickets: typed output, demonstrations first."""
