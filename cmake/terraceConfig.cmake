# find_package(terrace): targets terrace::client, terrace::store, terrace::tier, terrace::io, terrace::chunk,
# terrace::base.
include(CMakeFindDependencyMacro)
find_dependency(CURL)
find_dependency(Threads)
find_dependency(OpenSSL)
find_dependency(yaml-cpp)
find_dependency(PkgConfig)
pkg_check_modules(PUGIXML REQUIRED QUIET IMPORTED_TARGET pugixml)
pkg_check_modules(URING REQUIRED QUIET IMPORTED_TARGET liburing)
pkg_check_modules(XXHASH REQUIRED QUIET IMPORTED_TARGET libxxhash)
include(${CMAKE_CURRENT_LIST_DIR}/terraceTargets.cmake)
