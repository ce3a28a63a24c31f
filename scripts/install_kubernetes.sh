#!/usr/bin/env bash
# Builds kube-apiserver and kube-controller-manager 1.20.2 for `make test-kubernetes`, of Debian bookworm's source package:
# install_kubernetes.sh FOLDER. Nothing is installed; what is there already is kept, also of a run that was broken off.
# Wants Debian's apt-get and dpkg with the network, some 3 GiB below FOLDER, and 8 minutes of one CPU.
set -euo pipefail
programs=(kube-apiserver kube-controller-manager)
release=v1.20.2
source_package='kubernetes=1.20.5+really1.20.2-1.1+deb12u1'
compiler=(golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev)
folder=$(realpath -m "$1")
missing=()
for program in "${programs[@]}"; do
    [ -x "$folder/$program" ] || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || { echo "Kubernetes $release: $folder"; exit 0; }
echo "building ${missing[*]} $release in $folder, which takes some minutes"

for needed in apt-get dpkg dpkg-source; do
    command -v "$needed" >/dev/null || { echo "no $needed here: this needs Debian with dpkg-dev" >&2; exit 1; }
done
mkdir -p "$folder/deb" "$folder/tmp" "$folder/apt/lists/partial"
cd "$folder"

# Repositories of bookworm that apt knows as `Packages` or `Sources`.
repositories() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' "Created-By: $1" |
        awk '$2 ~ /^(bookworm|oldstable|stable)/' | sort -u
}

fetch() {
    local options=()
    if [ -z "$(repositories Sources)" ]; then
        # apt is told, for this command alone, that its repositories have sources, too.
        local keys=/usr/share/keyrings/debian-archive-keyring.gpg signed=
        [ ! -e "$keys" ] || signed="[signed-by=$keys]"
        repositories Packages | while read -r uri suite component; do
            echo "deb $signed $uri $suite $component"
            echo "deb-src $signed $uri $suite $component"
        done >apt/sources.list
        [ -s apt/sources.list ] || { echo "apt has no repository of bookworm: add one" >&2; exit 1; }
        options=(-o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=-
            -o "Dir::State::Lists=$folder/apt/lists" -o APT::Update::Post-Invoke::=)
        apt-get "${options[@]}" -qq update
    fi
    cd deb
    apt-get "${options[@]}" -qq source --download-only "$source_package"
    apt-get "${options[@]}" -qq download "${compiler[@]}"
    cd ..
}

unpack() {
    rm -rf go119 reflect2 gp
    mkdir -p go119 reflect2 "$sources"
    local package
    for package in deb/golang-1.19-*.deb; do dpkg -x "$package" go119; done
    dpkg -x deb/golang-github-modern-go-reflect2-dev_*.deb reflect2
    tar -x -f deb/kubernetes_*.orig.tar.* -C "$sources" --strip-components=1
    # Kubernetes' own copy of this package is too old for Go 1.18 and later.
    local vendored=$sources/vendor/github.com/modern-go/reflect2
    rm "$vendored"/*.go
    cp -r reflect2/usr/share/gocode/src/github.com/modern-go/reflect2/. "$vendored"
    touch deb/unpacked
}

# The one generated file that the source package lacks: the schemas of all objects.
generate_schemas() {
    local generated=pkg/generated/openapi/zz_generated.openapi.go inputs
    [ ! -s "$generated" ] || return 0
    go build -o "$folder/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    inputs=$(grep -rl --include='*.go' '+k8s:openapi-gen=true' vendor/k8s.io/ staging/src/k8s.io pkg | xargs -n1 dirname |
        sed -E 's#^(vendor|staging/src)/k8s.io/#k8s.io/kubernetes/vendor/k8s.io/#; s#^pkg/#k8s.io/kubernetes/pkg/#' |
        grep -v -E 'code-generator|sample-|/testdata|kube-openapi/test' | sort -u | paste -sd,)
    "$folder/openapi-gen" --logtostderr --go-header-file hack/boilerplate/boilerplate.generatego.txt \
        --input-dirs "$inputs,k8s.io/kubernetes/vendor/k8s.io/apimachinery/pkg/apis/meta/v1" \
        --output-base "$GOPATH/src" --output-package k8s.io/kubernetes/pkg/generated/openapi \
        --output-file-base zz_generated.openapi --report-filename "$folder/violations.txt"
}

build() {
    local package version=() program minor=${release#v1.}
    for package in component-base/version client-go/pkg/version; do
        package=k8s.io/kubernetes/vendor/k8s.io/$package
        version+=(-X "$package.gitVersion=$release" -X "$package.gitMajor=1" -X "$package.gitMinor=${minor%.*}")
    done
    for program in "${missing[@]}"; do
        go build -ldflags "-s -w ${version[*]}" -o "$folder/tmp/$program" "./cmd/$program"
        mv "$folder/tmp/$program" "$folder/$program"
        "$folder/$program" --version
    done
}

sources=$folder/gp/src/k8s.io/kubernetes
if [ ! -e deb/unpacked ]; then
    fetch
    unpack
fi
export GOROOT=$folder/go119/usr/lib/go-1.19 GOPATH=$folder/gp GOCACHE=$folder/gocache GOTMPDIR=$folder/tmp
export GO111MODULE=off GOPROXY=off GOFLAGS='' CGO_ENABLED=0 HOME=$folder PATH=$GOROOT/bin:$PATH
cd "$sources"
generate_schemas
build
