"""Methods, one short file each, and the slots that let them be added up."""
