"""Vision encoders and their captured graphs: shapes, preparation, packing, replay. No Ray in here."""
