// The one instance of asio's separately compiled part. Nothing else belongs here.
#include <boost/asio/impl/src.hpp>
