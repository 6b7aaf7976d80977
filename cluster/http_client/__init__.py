"""A client of the gateway for those who have no Ray: asyncio or plain calls, one answer an image, in order.

Connections are kept. What the gateway or a worker puts off (429, 503) and what a broken connection loses is asked again
after the `Retry-After` it was told, within `patience_s`: encoding twice does no harm. Free of torch and Ray.
"""

from cluster.http_client.async_client import AsyncHttpClient as AsyncHttpClient
from cluster.http_client.client import HttpClient as HttpClient
from cluster.http_client.refusals import error_of as error_of
from cluster.http_client.sources import Source as Source
