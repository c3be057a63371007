// The one instance of Beast's separately compiled part. Nothing else belongs here.
#include <boost/beast/src.hpp>
