"""What users call: pg.compile, pg.capture, pg.plan and pg.freeze."""
