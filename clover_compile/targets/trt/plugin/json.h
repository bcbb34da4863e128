// A reader of the JSON that launch plans are written in: integers, strings, arrays, objects, null
// and booleans. Anything else, and anything cut off, is a Fault.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace clover {

// What is wrong with a plan, its kernels or a call; becomes one line in the engine's log.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Json {
public:
    static Json parse(std::string_view text);

    bool isNull() const { return mKind == Kind::null; }
    bool isInteger() const { return mKind == Kind::integer; }
    int64_t integer() const;
    // An integer of 0..most.
    int64_t count(int64_t most) const;
    std::string const& string() const;
    std::vector<Json> const& array() const;
    // A member of an object; a Fault if it is missing.
    Json const& operator[](char const* name) const;

private:
    enum class Kind { null, boolean, integer, string, array, object };
    friend class JsonReader;

    Kind mKind{Kind::null};
    int64_t mInteger{};
    std::string mString;
    std::vector<Json> mArray;
    std::vector<std::pair<std::string, Json>> mMembers;
};

}  // namespace clover
