from tests.sections.conftest import client as client
