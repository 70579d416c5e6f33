"""A report of a workflow as one HTML file, and advice on what its rules should request.

    journal ──▶ gather_facts ──▶ ReportFacts ──▶ render_report ──▶ HTML
                                      └──▶ render_profile ──▶ set-resources

Facts are values; rendering is pure.
"""
