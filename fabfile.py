from tasks import ns as ns
